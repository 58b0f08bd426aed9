"""Experts on several devices: how tokens get to them, and what that sends."""

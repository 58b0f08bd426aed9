"""Experts on several devices: how tokens get to them, what that sends, and which copies lie where."""

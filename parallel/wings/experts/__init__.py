"""Experts on several devices: how tokens get to them, what that sends, who holds which copy."""

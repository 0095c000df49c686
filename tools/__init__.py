"""Commands for those who develop Penstock; no part of the package."""

"""Plug-ins that connect chunkattn to a serving framework; each imports its framework itself."""

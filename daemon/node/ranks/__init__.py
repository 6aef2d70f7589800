"""Where, as whom and with which environment ranks start."""

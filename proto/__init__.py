"""Protocol definitions (``*.proto``) and the code generated from them; see README.md for how it is made."""

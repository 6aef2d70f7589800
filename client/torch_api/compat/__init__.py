"""Names and interfaces of the original, for programs written for it: guests of ``train``."""

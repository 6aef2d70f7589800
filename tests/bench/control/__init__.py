"""Parts of ``control_plane.py``: ``way`` starts a coordinator, ``calls`` asks it, ``report`` shows figures; each other
module is a group of figures."""

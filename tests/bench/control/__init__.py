"""Parts of ``control_plane.py``: ``way`` starts a coordinator, ``calls`` asks it, ``figures`` and ``start`` measure,
``report`` shows what they found."""

"""Imported before anything that only Linux has: elsewhere the import of the library ends here, with words."""

from bagua.base.platforms import require_linux

require_linux()

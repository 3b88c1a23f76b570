"""How Sphinx builds the docs site: `make docs`, into build/docs, from the pages as they are in the repository."""

from __future__ import annotations

project = "Sluice"
author = "The Sluice authors"
project_copyright = "The Sluice authors, Apache-2.0"

extensions = ["myst_parser"]
source_suffix = {".md": "markdown"}
exclude_patterns = ["tests"]

# Headings get the anchors that links in the repository use, down to this level.
myst_heading_anchors = 4
# A link to a page, an anchor or a file that is not there is a warning, and `make docs` takes warnings for errors.
nitpicky = True
# Flags begin with two hyphens, which are not a dash.
smartquotes = False

html_theme = "furo"
html_title = "Sluice"
html_copy_source = False
html_show_sourcelink = False
html_show_sphinx = False
html_static_path = ["static"]
html_css_files = ["site.css"]
html_theme_options = {"sidebar_hide_name": False, "navigation_with_keys": True}
pygments_style = "tango"
pygments_dark_style = "monokai"

"""The documentation site: `make docs` builds it into out/site. Why so: decisions/documentation-site.md."""

project = html_title = "PerfGuard"
html_theme = "furo"
html_show_copyright = False
extensions = ["myst_parser", "sphinx_external_toc"]
# The source folder is the repository, so that a link to any of these pages works here as it does on a code host.
include_patterns = ["docs/**", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md", "optunahub/README.md", "models/*/cards/*"]
exclude_patterns = [".*", "out", "build", "tests"]  # not walked through
external_toc_path = "docs/_toc.yml"
myst_heading_anchors = 4  # the anchors that code hosts make

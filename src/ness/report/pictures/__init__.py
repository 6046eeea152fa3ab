"""The page's own pictures: geometry as plain data, turned into inline SVG by the templates."""

"""Models: click, class, count and regression models over sparse features."""

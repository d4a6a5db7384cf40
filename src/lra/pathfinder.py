"""Pathfinder images (to come)."""

LEVEL = "curv_contour_length_14"

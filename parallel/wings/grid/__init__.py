"""A grid of devices: linear maps split over two mesh axes (`on_grid`), and their `costs`."""

"""A grid of devices: linear maps split over two mesh axes (`ops`), and their `costs`."""

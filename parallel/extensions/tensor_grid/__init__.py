"""A grid of devices: linear maps sharded over two mesh axes (`ops`), and their `costs`."""

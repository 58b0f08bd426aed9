from hfjax.images.augment import Augment as Augment
from hfjax.images.find_images import parts_of as parts_of
from hfjax.images.image_loader import ImageLoader as ImageLoader
from hfjax.images.image_set import ImageSet as ImageSet, check_same_classes as check_same_classes

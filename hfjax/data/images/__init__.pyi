from hfjax.data.images.augment import Augment as Augment
from hfjax.data.images.dataset import ImageSet as ImageSet, check_same_classes as check_same_classes
from hfjax.data.images.find_images import parts_of as parts_of
from hfjax.data.images.loader import ImageLoader as ImageLoader

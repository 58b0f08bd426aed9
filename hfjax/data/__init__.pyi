from hfjax.data import images as images
from hfjax.data.build_dataset import prepare as prepare
from hfjax.data.grain_loader import from_grain as from_grain
from hfjax.data.stdlib_corpus import standard_library as standard_library
from hfjax.data.token_dataset import TokenSet as TokenSet
from hfjax.data.token_loader import Loader as Loader, share as share
from hfjax.data.token_writer import write_tokens as write_tokens
from hfjax.data.tokenizer import load_tokenizer as load_tokenizer

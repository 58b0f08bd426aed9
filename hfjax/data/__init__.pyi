from hfjax.data.library import standard_library as standard_library
from hfjax.data.loader import Loader as Loader, share as share
from hfjax.data.recipe import prepare as prepare
from hfjax.data.token_writer import write_tokens as write_tokens
from hfjax.data.tokenizer import load_tokenizer as load_tokenizer
from hfjax.data.tokens import TokenSet as TokenSet

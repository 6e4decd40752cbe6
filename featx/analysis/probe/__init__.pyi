from .labelled_rows import BLOCK_BYTES as BLOCK_BYTES
from .labelled_rows import Labelled as Labelled
from .labelled_rows import layer_rows as layer_rows
from .labelled_rows import output_folder as output_folder
from .leakage import MIN_FEATURES as MIN_FEATURES
from .leakage import NEAR_COSINE as NEAR_COSINE
from .run import run_probe as run_probe

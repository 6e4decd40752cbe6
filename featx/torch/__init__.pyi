from .feature_dataset import BlockShuffleSampler as BlockShuffleSampler
from .feature_dataset import FeatureDataset as FeatureDataset
from .token_dataset import TokenDataset as TokenDataset

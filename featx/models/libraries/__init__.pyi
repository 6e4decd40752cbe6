from .custom import copy_model as copy_model
from .custom import given_factory as given_factory
from .registry import LIBRARIES as LIBRARIES
from .registry import ModelLibrary as ModelLibrary
from .registry import build_backbone as build_backbone
from .registry import resolve_library as resolve_library

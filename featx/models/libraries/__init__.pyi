from .registry import LIBRARIES as LIBRARIES
from .registry import LibraryFunctions as LibraryFunctions
from .registry import ModelLibrary as ModelLibrary
from .registry import build_backbone as build_backbone
from .registry import library_member as library_member
from .registry import resolve_library as resolve_library

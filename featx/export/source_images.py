"""The pictures of a store's rows, from where its own config says they are."""

from __future__ import annotations

from featx.config import DataConfig
from featx.config.saved_config import data_of_saved, from_saved
from featx.errors import ConfigError, StoreError
from featx.store.reader import FeatureStore


def data_of_store(store: FeatureStore, asked: DataConfig) -> DataConfig:
    """The data set that a store was made of.

    Args:
        store: which keeps the config it was made with.
        asked: of the command now; a data.root given there is taken.

    Raises:
        StoreError: the store keeps no config that this featx can read.
        ConfigError: it names a URL, and the command does not.
    """
    try:
        saved = from_saved(str(store.attrs.get("config", "")))
    except ConfigError as error:
        raise StoreError(f"{store.root} does not say where its pictures are: {error}") from error
    return data_of_saved(saved, asked, str(store.root))

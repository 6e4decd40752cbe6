"""Access to the images of a store's rows, through the config that the store contains."""

from __future__ import annotations

from featx.config import DataConfig, data_of_saved, from_saved
from featx.errors import ConfigError, StoreError
from featx.store import FeatureStore


def data_of_store(store: FeatureStore, asked: DataConfig) -> DataConfig:
    """Return the options of the data set that a store was made from."""
    try:
        saved = from_saved(str(store.attrs.get("config", "")))
    except ConfigError as error:
        raise StoreError(f"{store.root} does not record where its images are: {error}") from error
    return data_of_saved(saved, asked, str(store.root))

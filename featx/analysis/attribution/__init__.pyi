from .attributor import Attributor as Attributor
from .contact_sheets import Tile as Tile
from .contact_sheets import contact_sheet as contact_sheet
from .contact_sheets import feature_map_grid as feature_map_grid

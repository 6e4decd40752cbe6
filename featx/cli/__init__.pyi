from .layer_tables import WIDTH as WIDTH
from .layer_tables import layer_rows as layer_rows
from .layer_tables import layer_table as layer_table
from .layer_tables import remarks as remarks
from .overrides import CommandLine as CommandLine
from .overrides import read_command_line as read_command_line

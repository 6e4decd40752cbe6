from .base import FORMATS as FORMATS
from .base import ExportFolder as ExportFolder
from .base import Format as Format
from .base import FormatMember as FormatMember
from .run import run_export as run_export

from .log import Alarm as Alarm
from .log import GradientAlarm as GradientAlarm
from .log import GradientLog as GradientLog
from .log import Limits as Limits
from .log import Step as Step
from .log import watch as watch

from .alarms import Alarm as Alarm
from .alarms import GradientAlarm as GradientAlarm
from .alarms import Limits as Limits
from .alarms import Step as Step
from .log import GradientLog as GradientLog
from .log import watch as watch

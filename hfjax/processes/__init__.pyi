from hfjax.processes.agreement import check_same as check_same, say as say, speaks as speaks
from hfjax.processes.exit_codes import exit_code as exit_code
from hfjax.processes.stop import Stop as Stop, leaving as leaving
from hfjax.processes.watchdog import Watchdog as Watchdog

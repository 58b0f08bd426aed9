from hfjax.distributed.consensus import check_same as check_same, say as say, speaks as speaks
from hfjax.distributed.exit_codes import exit_code as exit_code
from hfjax.distributed.stop import Stop as Stop, leaving as leaving
from hfjax.distributed.watchdog import Watchdog as Watchdog

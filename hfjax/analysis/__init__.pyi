from hfjax.analysis.count_collectives import Collectives as Collectives, collectives as collectives
from hfjax.analysis.count_transfers import Transfers as Transfers, host_transfers as host_transfers
from hfjax.analysis.residuals import saved_residuals as saved_residuals
from hfjax.analysis.search_offload import least_offload as least_offload
from hfjax.analysis.targets import target_devices as target_devices

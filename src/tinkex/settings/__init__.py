"""The only reader of the environment and of configuration files. An explicit argument always wins.

Others import this package only:
    client    resolves what a client needs (`Config`, table `CLIENT`)
    serve     resolves what a service needs (`ServeConfig`, table `SERVE`)
    limits    every limit that a service enforces (`LIMITS`, part of `SERVE`)
    home      finds the data folder that programs share, and the service on it
    setting   one row of such a table, and how values are gathered and read
    folders   where files are on this machine

`docs/settings.md` and the flags of `tinkex serve` are made from the tables.
"""

from __future__ import annotations

from tinkex.settings.client import CLIENT as CLIENT
from tinkex.settings.client import DEFAULT_BASE_URL as DEFAULT_BASE_URL
from tinkex.settings.client import ENVIRONMENT as ENVIRONMENT
from tinkex.settings.client import KEYLESS as KEYLESS
from tinkex.settings.client import LOG as LOG
from tinkex.settings.client import SHARED_ENVIRONMENT as SHARED_ENVIRONMENT
from tinkex.settings.client import Config as Config
from tinkex.settings.client import is_loopback as is_loopback
from tinkex.settings.client import is_loopback_host as is_loopback_host
from tinkex.settings.client import log_level as log_level
from tinkex.settings.client import normalise_url as normalise_url
from tinkex.settings.client import proxy_for as proxy_for
from tinkex.settings.client import resolve as resolve
from tinkex.settings.client import sources as sources
from tinkex.settings.home import client_arguments as client_arguments
from tinkex.settings.home import home as home
from tinkex.settings.home import service_of_home as service_of_home
from tinkex.settings.home import shown_settings as shown_settings
from tinkex.settings.limits import LIMITS as LIMITS
from tinkex.settings.limits import Limit as Limit
from tinkex.settings.serve import KEY_PREFIX as KEY_PREFIX
from tinkex.settings.serve import SERVE as SERVE
from tinkex.settings.serve import ServeConfig as ServeConfig
from tinkex.settings.serve import bucket_access as bucket_access
from tinkex.settings.serve import bucket_variables as bucket_variables
from tinkex.settings.serve import check_cluster as check_cluster
from tinkex.settings.serve import check_keys as check_keys
from tinkex.settings.serve import check_postgres as check_postgres
from tinkex.settings.serve import private_environment as private_environment
from tinkex.settings.serve import resolve_serve as resolve_serve
from tinkex.settings.serve import write_private_file as write_private_file
from tinkex.settings.setting import Setting as Setting

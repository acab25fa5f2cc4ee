"""`python -m tresnet` is the `tresnet` command."""

import sys

from tresnet.cli.main import main

sys.exit(main())

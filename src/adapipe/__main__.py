"""`python -m adapipe` is the same as the `adapipe` command."""

from adapipe.cli.main import main

raise SystemExit(main())

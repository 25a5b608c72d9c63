"""AdaPipe: pipeline-parallel training that alternates between synchronous and asynchronous phases."""

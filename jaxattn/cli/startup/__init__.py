"""How a command starts an engine: model source, compile cache, hosts, progress, report."""

"""How the control plane speaks to hosts' agents: a port and its adapters."""

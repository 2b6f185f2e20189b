"""The SDK. Import its names from `shoal`; what is not there is not promised.

operations (generators, no I/O)    client_core, session_core, platform_core, transfer, retry, steps
drivers and connections            drivers, pools
twins                              sync_*, async_*
"""

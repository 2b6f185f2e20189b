"""`shoal simulate`: the real planner, placement and capacity driver under a made-up load, in virtual time."""

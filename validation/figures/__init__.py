"""The plots of the ledger's page and of the notebooks, a subject each: functions of a measurement's data."""

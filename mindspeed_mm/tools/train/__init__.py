"""`mindspeed-mm train`: start the processes of a run, whatever way its launch is written down."""

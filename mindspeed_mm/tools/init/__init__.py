"""`mindspeed-mm init`: look at a model's directory and at data, and write a run that is ready to start."""

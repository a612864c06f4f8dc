"""`mindspeed-mm data convert`: rows of common data sets in one form, checked, with their media beside them."""

"""Files of weights: functions that find, read, rename, check and write them."""

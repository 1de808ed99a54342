"""`quire status --watch`: what the suite does now, on one screen that is drawn again every two seconds."""

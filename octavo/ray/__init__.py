"""octavo in Ray's programs: a Ray Serve application and a stage of Ray Data (`pip install 'octavo[ray]'`)."""

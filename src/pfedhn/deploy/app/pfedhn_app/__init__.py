"""The app that Flower carries: it only calls pfedhn, which is installed at the server and at every party."""

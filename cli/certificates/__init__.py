"""The development CA: where its certificates lie, and what makes them."""

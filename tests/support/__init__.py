# SPDX-License-Identifier: Apache-2.0
"""What the tests and the demo share."""

// The same subject without a test framework: most of the other's compile time is the framework's.
#include <cstdio>
#include <stdexcept>

#include "matrix.hpp"

static int failures = 0;

static void check(bool holds, const char* what) {
    if (!holds) {
        std::fprintf(stderr, "failed: %s\n", what);
        ++failures;
    }
}

static bool is_refused(const char* expression) {
    try {
        evaluate(expression);
    } catch (const std::logic_error&) {
        return true;
    }
    return false;
}

int main() {
    check(evaluate("[1 2; 3 4] * [1 0; 0 1]").near(Matrix::parse("1 2; 3 4"), 0), "a product with one");
    check(evaluate("[1 2; 3 4]' + [1 1; 1 1]").near(Matrix::parse("2 4; 3 5"), 0), "a sum");
    check(evaluate("inv [2 0; 0 4] * [2 0; 0 4]").near(Matrix::identity(2), 1e-12), "an inverse");
    check(evaluate("[1 1; 1 0] ^ 5").at(0, 1) == 5, "a power");
    check(evaluate("det [1 2; 3 4]").at(0, 0) < 0, "a determinant");
    check(is_refused("[1 2") && is_refused("[1] [2]") && is_refused("inv [1 2; 2 4]"), "texts that are refused");
    for (std::size_t size = 1; size <= 12; ++size) {
        Matrix matrix = Matrix::identity(size).scaled(3.0);
        matrix.at(0, size - 1) += 1;
        check(matrix.times(matrix.inverse()).near(Matrix::identity(size), 1e-9), "an inverse of any size");
    }
    return failures == 0 ? 0 : 1;
}

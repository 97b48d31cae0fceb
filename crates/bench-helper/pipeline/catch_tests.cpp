#define CATCH_CONFIG_MAIN
#include <catch2/catch.hpp>

#include <sstream>
#include <stdexcept>

#include "matrix.hpp"

static Matrix m(const char* text) {
    return Matrix::parse(text);
}

TEST_CASE("texts are matrices", "[parse]") {
    REQUIRE(m("1 2; 3 4").at(1, 0) == 3);
    REQUIRE(m("1 2 3").columns() == 3);
    REQUIRE_THROWS_AS(m("1 2; 3"), std::invalid_argument);
    REQUIRE_THROWS_AS(m("a"), std::invalid_argument);
    REQUIRE_THROWS_AS(m(""), std::invalid_argument);
    std::ostringstream out;
    out << m("1 2; 3 4");
    REQUIRE(out.str() == "1 2; 3 4");
}

TEST_CASE("sums, products and powers", "[arithmetic]") {
    REQUIRE(m("1 2; 3 4").plus(m("4 3; 2 1")).near(Matrix(2, 2, 5), 0));
    REQUIRE(m("1 2; 3 4").times(m("0 1; 1 0")).near(m("2 1; 4 3"), 0));
    REQUIRE(m("1 1; 1 0").power(10).near(m("89 55; 55 34"), 0));
    REQUIRE(m("1 2").scaled(3).near(m("3 6"), 0));
    REQUIRE_THROWS_AS(m("1 2").plus(m("1; 2")), std::invalid_argument);
    REQUIRE_THROWS_AS(m("1 2").times(m("1 2")), std::invalid_argument);
}

TEST_CASE("inverses", "[inverse]") {
    for (std::size_t size = 1; size <= 24; ++size) {
        Matrix matrix(size, size);
        for (std::size_t r = 0; r < size; ++r) {
            for (std::size_t c = 0; c < size; ++c) {
                matrix.at(r, c) = r == c ? 2.0 * size : 1.0 / (1.0 + r + c);
            }
        }
        CAPTURE(size);
        CHECK(matrix.times(matrix.inverse()).near(Matrix::identity(size), 1e-9));
        CHECK(matrix.transposed().transposed().near(matrix, 0));
    }
    REQUIRE_THROWS_AS(m("1 2; 2 4").inverse(), std::domain_error);
    REQUIRE(m("3 1; 4 2").determinant() == Approx(2));
}

TEST_CASE("expressions", "[evaluate]") {
    REQUIRE(evaluate("[1 2; 3 4] * [1 0; 0 1]").near(m("1 2; 3 4"), 0));
    REQUIRE(evaluate("[1 2; 3 4]' + [1 1; 1 1]").near(m("2 4; 3 5"), 0));
    REQUIRE(evaluate("inv [2 0; 0 4] * [2 0; 0 4]").near(Matrix::identity(2), 1e-12));
    REQUIRE(evaluate("det [1 2; 3 4]").at(0, 0) == Approx(-2));
    REQUIRE(evaluate("[1 1; 1 0] ^ 5").at(0, 1) == Approx(5));
    REQUIRE_THROWS_AS(evaluate("[1 2"), std::invalid_argument);
    REQUIRE_THROWS_AS(evaluate("[1] ^ x"), std::invalid_argument);
    REQUIRE_THROWS_AS(evaluate("[1] [2]"), std::invalid_argument);
}
